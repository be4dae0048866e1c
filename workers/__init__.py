"""One thin entry program per role. The logic is in `accumulator`; `accumulator worker` runs them too."""
