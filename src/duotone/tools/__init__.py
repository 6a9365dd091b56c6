"""Tools that know no other room: files, digests, devices, compilation, captures and warnings."""
