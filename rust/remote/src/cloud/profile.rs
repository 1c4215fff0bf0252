//! Reads the files in which AWS's own tools keep credentials and settings. The environment takes precedence.

use std::path::PathBuf;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

/// Adds the settings that the environment does not have.
pub(super) fn complete(mut builder: AmazonS3Builder) -> AmazonS3Builder {
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    let mut fill = |text: &str, section: &str, names: &[(&str, AmazonS3ConfigKey)]| {
        for (name, key) in names {
            if builder.get_config_value(key).is_none()
                && let Some(value) = setting(text, section, name)
            {
                builder = std::mem::take(&mut builder).with_config(*key, value);
            }
        }
    };
    let config = file("AWS_CONFIG_FILE", "config");
    let section = if profile == "default" {
        profile.clone()
    } else {
        format!("profile {profile}")
    };
    use AmazonS3ConfigKey::{AccessKeyId, Endpoint, Region, SecretAccessKey, Token};
    if builder_region_is_open() {
        fill(&config, &section, &[("region", Region)]);
    }
    fill(&config, &section, &[("endpoint_url", Endpoint)]);
    // A key and its secret belong together. A role in the environment takes precedence over the files.
    let named = [
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ];
    if named.iter().all(|name| std::env::var_os(name).is_none()) {
        let keys = [
            ("aws_access_key_id", AccessKeyId),
            ("aws_secret_access_key", SecretAccessKey),
            ("aws_session_token", Token),
        ];
        let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
        if setting(&credentials, &profile, "aws_access_key_id").is_some() {
            fill(&credentials, &profile, &keys);
        } else {
            fill(&config, &section, &keys);
        }
    }
    builder
}

/// Whether the environment has no region, which has two names there.
fn builder_region_is_open() -> bool {
    ["AWS_REGION", "AWS_DEFAULT_REGION"]
        .iter()
        .all(|name| std::env::var_os(name).is_none())
}

/// The text of a file that a variable names, or that is in `~/.aws`; empty if there is none.
fn file(variable: &str, name: &str) -> String {
    let home = || {
        Some(
            PathBuf::from(std::env::var_os("HOME")?)
                .join(".aws")
                .join(name),
        )
    };
    let path = std::env::var_os(variable).map(PathBuf::from).or_else(home);
    path.and_then(|path| std::fs::read_to_string(path).ok())
        .unwrap_or_default()
}

/// A setting of a section.
fn setting(text: &str, section: &str, name: &str) -> Option<String> {
    let mut is_ours = false;
    for line in text.lines().map(str::trim) {
        if let Some(head) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            is_ours = head.trim() == section;
        } else if is_ours
            && let Some((key, value)) = line.split_once('=')
            && key.trim() == name
        {
            return Some(value.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_of_its_own_section() {
        let text = "# comment\n[default]\nregion = eu-1\n\n[ profile b ]\nregion=us-1\naws_access_key_id = K=1\n";
        assert_eq!(setting(text, "default", "region").as_deref(), Some("eu-1"));
        assert_eq!(
            setting(text, "profile b", "region").as_deref(),
            Some("us-1")
        );
        assert_eq!(
            setting(text, "profile b", "aws_access_key_id").as_deref(),
            Some("K=1")
        );
        assert_eq!(setting(text, "default", "aws_access_key_id"), None);
        assert_eq!(setting("region = x", "default", "region"), None);
    }
}
