"""Calls of a client's functions: the formats that models write, their grammars and their parser."""
