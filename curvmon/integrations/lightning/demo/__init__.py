"""`python -m curvmon demo`: a run of a minute with an alert. Needs scikit-learn, matplotlib and tensorboard."""
