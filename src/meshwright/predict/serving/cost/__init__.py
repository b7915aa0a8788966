"""Cost model of serving: step time, attention, KV cache memory and quantization.

`StepCost` combines layer and attention costs of one `Replica` under one `ServingEngine`.
"""
