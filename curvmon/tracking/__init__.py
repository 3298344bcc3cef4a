"""What is kept of measurements over time; knows torch and torchmetrics, no Trainer."""
