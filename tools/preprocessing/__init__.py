"""What tools/preprocess_data.py shows, and how many workers it takes."""
