"""What a step costs: a model, a machine, a roofline."""
