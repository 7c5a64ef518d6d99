"""HTTP: the trainer serves a version's bytes, workers fetch them in as many pieces as it takes."""
