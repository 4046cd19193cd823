"""What training and serving code calls: the public function, dispatch, read-only tables."""
