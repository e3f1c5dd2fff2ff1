"""One file of checks a chapter, `NN_name.py`, loaded when the first of its tasks is asked for."""
