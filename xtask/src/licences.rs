//! Every dependency's licence is one that `deny.toml` allows. The same list serves `cargo deny`
//! where it is installed; this check needs nothing but cargo.

use std::process::Command;

use serde_json::Value;

use crate::Outcome;

pub(crate) fn check() -> Outcome {
    let allowed = allowed()?;
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let refused: Vec<String> = packages
        .iter()
        .filter(|package| !package["license"].as_str().is_some_and(|l| is_allowed(l, &allowed)))
        .map(|package| format!("{} ({})", package["name"], package["license"]))
        .collect();
    println!("{} packages, {} licences allowed", packages.len(), allowed.len());
    match refused.is_empty() {
        true => Ok(()),
        false => Err(format!("licences that deny.toml does not allow: {}", refused.join(", "))),
    }
}

/// The strings between `allow = [` and `]` in `deny.toml`.
fn allowed() -> Outcome<Vec<String>> {
    let text =
        std::fs::read_to_string("deny.toml").map_err(|error| format!("deny.toml: {error}"))?;
    let list = text.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']'));
    let (list, _) = list.ok_or("deny.toml has no list of allowed licences")?;
    Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

fn metadata() -> Outcome<Value> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--all-features", "--locked"])
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))
}

/// An SPDX expression of the forms that occur: `A OR B`, `A AND B`, `A/B`, parentheses around ORs.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let plain = expression.replace(['(', ')'], " ").replace('/', " OR ");
    plain.split(" AND ").all(|part| {
        part.split(" OR ").any(|licence| allowed.iter().any(|one| one == licence.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_judged() {
        let allowed = ["MIT".to_owned(), "Unicode-3.0".to_owned()];
        assert!(is_allowed("MIT OR Apache-2.0", &allowed));
        assert!(is_allowed("(MIT OR Apache-2.0) AND Unicode-3.0", &allowed));
        assert!(is_allowed("Apache-2.0/MIT", &allowed));
        assert!(!is_allowed("GPL-3.0", &allowed));
        assert!(!is_allowed("MIT AND GPL-3.0", &allowed));
    }
}
