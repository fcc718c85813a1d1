"""Commands of run.sh, which combine `data/` and `lion/`. No other package imports them."""
