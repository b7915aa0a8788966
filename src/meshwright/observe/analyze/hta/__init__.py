"""What Holistic Trace Analysis 0.5 prints for a trace, by its own rules.

Some of those rules are wrong on today's traces, as `docs/analyze/hta.md` says one by one: use this
to compare with figures that HTA made, and the analyses beside this folder for everything else.
"""
