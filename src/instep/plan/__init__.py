"""Plans: which bytes of which checkpoint tensor go where in which worker, and the proof that
nothing is missing or written twice.

Pure functions of `protocol` structs: no device, no network, no engine.

    region.py   strided boxes of a flat index space: from a view, as a box, disjoint or not
    routes.py   checks of metadata and worker plans; what a push moves and how each layer is applied
"""
