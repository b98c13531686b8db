"""HTML pages of one file each, without network: tables, and plots by plotly.js, which
is inside the page.
"""
