"""The trainer of a loop where several ranks hold the model together.

refusals   which settings a layout of several ranks cannot have
meeting    how the ranks of a run find each other
orders     what the first rank tells the others to do, and how these wait for it
dealing    the answers of an update, dealt to replicas
passes     a model that ranks hold together, as passes over rollouts see it
step       one step of training on judged rollouts
warm_up    supervised steps before the first rollout
state      what one rank has of all that is trained
offering   the way of weights from all ranks to the engines of the first
leading    the first rank: what a driver asks for, done by all
following  every other rank

The first rank drives: it has the controller, the engines, the verifiers and the run's files. All
ranks have all rollouts of a step, so each knows the whole update that it computes a share of.
"""
