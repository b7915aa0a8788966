"""Weights from ranks that train to ranks that serve, by the plan of `policy.resharding`.

    weight_tensors           what a rank of either side has, with its place in the whole model
    bucket_packing           slices to bytes and back: casts, the trailer with version and checksum
    weight_buffer            what has come of a version, kept aside until all of it is there
    in_process_transfer      both sides in one process
    shared_memory_transfer   processes of one machine, through files in memory
    process_group_transfer   ranks of one process group, by gloo or NCCL
    weight_sender            versions that lie in shared memory for engines elsewhere
    weight_receiver          engines whose ranks receive available versions; `__main__` is one
    adapter_slot             an adapter in training where an engine answers with it
    engine_weights           an engine that takes versions between its turns

A version is taken whole or not at all: until every bucket has come and was found sound, an engine
answers with the version it has.
"""
