"""Generated tasks that isolate one ability of a mixer: associative recall and selective copying."""
