"""The parts of convergence/run.py and convergence/tensors.py: studies, data, training, measurement, report."""
