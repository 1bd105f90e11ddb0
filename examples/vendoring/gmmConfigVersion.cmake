# The version is that of the installed headers. Versions before 1.0 serve requests for their own minor number alone.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../include/gmm_quant.h" line REGEX "^#define GMM_VERSION_STRING ")
string(REGEX REPLACE ".*\"(.*)\".*" "\\1" PACKAGE_VERSION "${line}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" series "${PACKAGE_VERSION}")
if("${PACKAGE_FIND_VERSION}" STREQUAL "${PACKAGE_VERSION}")
    set(PACKAGE_VERSION_EXACT TRUE)
endif()
if("${PACKAGE_FIND_VERSION_MAJOR}.${PACKAGE_FIND_VERSION_MINOR}" STREQUAL "${series}" AND
   NOT "${PACKAGE_VERSION}" VERSION_LESS "${PACKAGE_FIND_VERSION}")
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
