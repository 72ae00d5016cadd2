//! mutants
