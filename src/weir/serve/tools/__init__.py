"""Tools: the formats of calls, their grammars and their parser, and the server's own tools."""
