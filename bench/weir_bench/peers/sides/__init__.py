"""The scripts of the peers (their sides), which run in separate processes.

Most of them run in an environment without weir.
"""
