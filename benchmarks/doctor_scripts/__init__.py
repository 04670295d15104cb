"""Scripts as anybody writes them, which `bench doctor_run` trains; they know nothing of flatout."""
