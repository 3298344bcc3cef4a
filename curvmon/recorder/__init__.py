"""Recording a run, in any training loop: measure, keep, raise alerts, report."""
