"""Fair comparisons: many short trainings that differ in what is compared and in nothing else.

`options` is a study as a YAML file, `grid` the trials it comes to, `fairness` what they must share,
`run` carries them out, `report` chooses on validation and reports on test.
"""
