"""Request bodies: pydantic models with a bound on every number and list."""
