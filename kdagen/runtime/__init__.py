"""What training and serving code calls: the public function, its dispatch and its read-only tables."""
