"""The commands. They join `data/` and `lion/`; nothing imports them."""
