"""``eqlen sweep``: recipes x methods x seeds as ordinary runs, at equal cost, and the tables of all.

    sweep file ─► cells ─► runner ─► run folders ─► results: tables, figures

Run folders are the only state: progress and budgets are read from them.
"""
