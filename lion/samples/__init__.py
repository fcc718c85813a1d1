"""The contract between data sets and tasks: kinds of samples, their order, random numbers by key."""
