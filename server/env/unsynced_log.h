// What a file system would have lost: the undo log behind FaultyFileSystem's `unsynced`.
#ifndef SHARDD_SERVER_ENV_UNSYNCED_LOG_H_
#define SHARDD_SERVER_ENV_UNSYNCED_LOG_H_

#include <cstdint>
#include <string>

namespace shardd::env {

// Each call is made before (log) or after (forget) the change that it is about. The caller
// serializes them. All are Posix calls; a failure of the log itself ends the process, since the
// test that relies on it would show nothing.

// The content of the file at `path` in [offset, offset + bytes), and its length.
void LogContent(const std::string& path, uint64_t offset, uint64_t bytes);
void ForgetContent(const std::string& path);

void LogCreation(const std::string& path);
void LogRename(const std::string& from, const std::string& to);
void LogRemoval(const std::string& path);
void ForgetNames(const std::string& directory);

// Whether `name` is one of the log's own files.
bool IsUnsyncedLog(const std::string& name);

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_UNSYNCED_LOG_H_
