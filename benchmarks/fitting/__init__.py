"""The enrollment fit on a large Parquet file, beside its peers."""
