"""One traffic, served with a fixed split and elastically, checked against transformers."""
