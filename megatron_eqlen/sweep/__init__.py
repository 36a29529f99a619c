"""``eqlen sweep``: recipes x methods x seeds as ordinary runs, at equal cost, and the tables of all.

    sweep file ─► cells ─┬─► runner, here        ─► run folders ─► tables, figures
                         └─► slurm, job arrays ──┘

What is done and what a run may spend is read from the run folders: there is no other state.
"""
