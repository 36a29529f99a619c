"""``eqlen sweep``: recipes x methods x seeds as ordinary runs, at equal cost, and the tables of all.

    sweep file ─► cells ─► runner ─► run folders ─► results: tables, figures

Progress and budgets are read from the run folders: there is no other state.
"""
