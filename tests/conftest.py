"""Being here puts tests/ on the path, so that tests can import the helpers beside this file."""
