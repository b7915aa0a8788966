"""Layouts compared with one device: the same step of a small model, tensor by tensor.

shrunk_model          a small model of the same kind as a real one
verification_step     one step of it, on one device or on this rank of a layout
activation_probe      the result of each operation while it runs
deviation             how far tensors of a rank are from those of one device
tolerances            how far they may be
layout_verification   all of it for several layouts, each on processes of this machine
dry_run               a step without memory or communication, on one process
"""
