"""Export of runs to files of other programs."""
