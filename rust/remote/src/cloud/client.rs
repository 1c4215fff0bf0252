//! The clients of object stores, and their credentials.

use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};

use super::profile;
use crate::location::{Location, LocationError, Scheme};

/// Hosts from which a machine gets the credentials of its role.
pub(super) const ROLES: [&str; 3] = [
    "metadata.google.internal",
    "169.254.169.254",
    "169.254.170.2",
];

/// The remedy for missing or wrong credentials of a kind of store.
pub(super) fn credentials(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Gs => {
            "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key, or give the instance a service \
             account, that may read, write, list and delete objects below the prefix"
        }
        Scheme::Az => {
            "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY (base64) or an identity of the instance, that \
             may read, write, list and delete blobs below the prefix"
        }
        _ => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the pod or the instance a role, \
             that may read, write, list and delete objects below the prefix; set AWS_REGION"
        }
    }
}

/// The remedy if a store cannot be reached.
pub(super) fn reach(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Gs => "check the bucket in the URL, and the way to storage.googleapis.com",
        Scheme::Az => {
            "check the container in the URL, AZURE_STORAGE_ACCOUNT_NAME, and the way to that account's blob service"
        }
        _ => {
            "check the bucket in the URL, AWS_REGION, and the address in AWS_ENDPOINT_URL (without it, Amazon's)"
        }
    }
}

/// Codes of a store that considers a request's time too old or too new, and the remedy.
pub(super) const CLOCK_WORDS: [&str; 2] = ["RequestTimeTooSkewed", "RequestExpired"];
pub(super) const CLOCK: &str =
    "set this machine's clock by NTP: the store refuses requests of another time";

/// The client of a store. All settings but the bucket come from the environment, files, or the machine's role.
pub(super) fn client(
    location: &Location,
) -> std::result::Result<(&'static str, Arc<dyn ObjectStore>), LocationError> {
    // This module has its own limits.
    let options = [
        (ClientConfigKey::ConnectTimeout, "1 second"),
        (ClientConfigKey::Timeout, "120 seconds"),
        (ClientConfigKey::ReadTimeout, "120 seconds"),
        (ClientConfigKey::PoolIdleTimeout, "20 seconds"),
    ];
    let no_retry = RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    };
    let bucket = location.host.as_str();
    let advice = |error: object_store::Error| {
        let remedy = credentials(location.scheme);
        location.refused(format_args!("{error}; {remedy}"))
    };
    let check = |address, allowed| {
        super::endpoint::check(address, allowed).map_err(|error| location.refused(error))
    };
    match location.scheme {
        Scheme::Gs => {
            let mut builder = GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(bucket)
                .with_retry(no_retry);
            for (key, value) in options {
                builder = builder.with_config(GoogleConfigKey::Client(key), value);
            }
            let allowed = GoogleConfigKey::Client(ClientConfigKey::AllowHttp);
            check(
                (
                    "GOOGLE_BASE_URL",
                    builder.get_config_value(&GoogleConfigKey::BaseUrl),
                ),
                ("GOOGLE_ALLOW_HTTP", builder.get_config_value(&allowed)),
            )?;
            let store = builder.build();
            let store = store.map_err(advice)?;
            Ok(("gs", Arc::new(store)))
        }
        Scheme::Az => {
            let mut builder = MicrosoftAzureBuilder::from_env()
                .with_container_name(bucket)
                .with_retry(no_retry);
            for (key, value) in options {
                builder = builder.with_config(AzureConfigKey::Client(key), value);
            }
            let allowed = AzureConfigKey::Client(ClientConfigKey::AllowHttp);
            check(
                (
                    "AZURE_STORAGE_ENDPOINT",
                    builder.get_config_value(&AzureConfigKey::Endpoint),
                ),
                ("AZURE_ALLOW_HTTP", builder.get_config_value(&allowed)),
            )?;
            let store = builder.build();
            let store = store.map_err(advice)?;
            Ok(("az", Arc::new(store)))
        }
        _ => {
            let mut builder = profile::complete(AmazonS3Builder::from_env())
                .with_bucket_name(bucket)
                .with_unsigned_payload(true)
                .with_retry(no_retry);
            for (key, value) in options {
                builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
            }
            let allowed = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
            for (variable, key) in [
                ("AWS_ENDPOINT_URL", AmazonS3ConfigKey::Endpoint),
                ("AWS_ENDPOINT_URL_S3", AmazonS3ConfigKey::S3Endpoint),
            ] {
                check(
                    (variable, builder.get_config_value(&key)),
                    ("AWS_ALLOW_HTTP", builder.get_config_value(&allowed)),
                )?;
            }
            let store = builder.build();
            let store = store.map_err(advice)?;
            Ok(("s3", Arc::new(store)))
        }
    }
}
