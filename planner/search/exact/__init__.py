"""The exact single-pipeline solver, the combination over count vectors, and the lower bound (design 5.2).

Reads as: `pool` and `stage_table` (what a stage can be) -> `chains` (the best pipeline for given device
prices) -> `prices` (what a device is worth) -> `columns` (least periods of every count vector) -> `combine`
(which pipelines) -> `sequences` (their stages) -> `placement` (their devices) -> `refine` (on the true
price); `bound` proves how good the result can be.
"""
