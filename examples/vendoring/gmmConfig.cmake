# find_package(gmm) of an installation: gmm::gmm and gmm::impl, which the project compiles with its own settings.
include("${CMAKE_CURRENT_LIST_DIR}/gmm.cmake")
