"""``eqlen sweep``: recipes x methods x seeds as ordinary runs, at equal cost, and the tables of all.

    sweep file ─► cells ─┬─► runner, here        ─► run folders ─► tables, figures
                         └─► slurm, job arrays ──┘

Progress and budgets are read from the run folders: there is no other state.
"""
