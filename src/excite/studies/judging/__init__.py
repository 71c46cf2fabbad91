"""From the numbers of several seeds to verdicts: intervals, Holm's correction, stored numbers judged again, how many seeds are needed."""
