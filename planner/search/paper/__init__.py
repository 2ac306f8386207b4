"""The paper's own search (sections 4.2, 5 and 6), each part a file and an option of its own.

`search` tells the story: pipeline device groups (`device_groups`), in the order of Eq. 7-9 (`order`) or by the
dynamic program of Eq. 10 (`dynamic`), skipped by bounds (`skipping`) or evaluated (`pipelines`, `bottleneck`,
`moves`, `configuration`) and balanced (`balance`). Nothing here is exact; `planner.search.exact` is.
"""
