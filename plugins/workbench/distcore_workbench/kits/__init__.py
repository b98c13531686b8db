"""The suites of laws of every kind of plugin beside strategies and tasks, for
``distcore check`` and pytest.
"""
