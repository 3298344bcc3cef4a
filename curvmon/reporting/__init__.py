"""Where results are shown: loggers, dashboards, figures, console."""
