"""The peers' ways to plan, on our cost model: `metis`, `hexiscale`, `type_split`, `uniform`.

Reads as: `forms` (a stage without devices) -> `seats` (devices for stages) -> `bench` (layers, estimate,
price) -> one file a peer, which says what the peer's method is and how it is searched here.
"""
