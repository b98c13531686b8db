"""Reports of runs: curves, tables and samples of one run or several, in the terminal
and as a page.
"""
