"""The prediction of a training step on a cluster that is not at hand.

    layer_profile, roofline   when each gradient is ready --+
    cluster                   links, nodes, one device -----+-->  scenario  -->  step, stragglers   where time goes
    allreduce.plan            how each bucket travels ------+               -->  best_settings      what is faster

`predict` goes from the options of `fourmin plan` to a `SimulationResult`, which `result` and `picture` show.
"""
