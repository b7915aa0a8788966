"""The trainer of a loop where several ranks hold the model together.

commands               what the first rank tells the others to do, and how these wait for it
microbatch_assignment  the answers of an update, dealt to replicas
sharded_model          a model that ranks hold together, as passes over rollouts see it
sharded_policy_step    one step of training on judged rollouts
sharded_critic         the critic of such a step
rank_state             what one rank has of all that is trained
weight_sender          the way of weights from all ranks to the engines of the first
lead_rank              the first rank: what a driver asks for, done by all
worker_rank            every other rank

The first rank drives: it has the controller, the engines, the verifiers and the run's files. All
ranks have all rollouts of a step, so each knows the whole update that it computes a share of.
"""
