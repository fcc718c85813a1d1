"""`./run.sh bench ...`: what is fast, how fast, and what it takes."""
