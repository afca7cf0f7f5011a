// Parameters of image_windows.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header).
#pragma once

enum Parameter : int {
  VALUE_BYTES = 2,  // 2 or 4
  X_CHANNELS = 3,  // of the image
  VECTOR = 4,  // channels of the copy
  GROUP_ROWS = 2,  // rows of a group: the filter's stride
};
