"""Layouts held against one device: the same step of a small model, tensor by tensor.

shrink        a small model of the same kind as a real one
step          one step of it, on one device or on this rank of a layout
probe         what comes out of each operation while it runs
compare       how far tensors of a rank are from those of one device, and how far they may be
verify        all of it for several layouts, each on processes of this machine
"""
