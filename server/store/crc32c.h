// The checksum of everything that the daemon stores.
#ifndef SHARDD_SERVER_STORE_CRC32C_H_
#define SHARDD_SERVER_STORE_CRC32C_H_

#include "proto/contract/crc32c.h"

namespace shardd::store {

using contract::Crc32c;

}  // namespace shardd::store

#endif  // SHARDD_SERVER_STORE_CRC32C_H_
